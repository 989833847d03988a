"""One peer: everything I can say to it. Lanes, credit, matching, and the waiting that drives them."""
