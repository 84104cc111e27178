"""What methods are made of: kinds of method, and the parts that they share."""
