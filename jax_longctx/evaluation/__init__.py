"""Tasks with known answers, run over methods and lengths, with intervals."""
