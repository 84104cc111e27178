"""Studies of papers: emulations of published code, and analyses that its figures need."""
