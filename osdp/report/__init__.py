"""The report of a plan as one HTML file: `contents` gathers what it says, `render` writes it."""
