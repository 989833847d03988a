"""Arrays made smaller before they travel, and what of that has to be agreed on."""
