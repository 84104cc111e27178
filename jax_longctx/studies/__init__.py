"""Single papers: their suites and figures, their analyses, emulations of their released code."""
