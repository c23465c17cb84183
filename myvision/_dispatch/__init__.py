"""What torch's dispatcher must be told of an operator; every private name of torch stands here."""
