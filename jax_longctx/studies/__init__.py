"""What single papers say and measure: their suites, their figures, their analyses."""
