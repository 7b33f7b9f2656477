"""What runs the steps of one model under one plan: the protocol, and the engines that implement it."""
