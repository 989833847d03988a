"""What you type: `nexar run`, `nexar seed`, `nexar config`, `nexar doctor`, `nexar bench`."""
