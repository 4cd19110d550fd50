"""The pipeline methods: each is an order of actions, and a rule for the weights that each action reads."""
