"""Whether a model, a method and a context fit a target, and how long they take."""
