"""Commands about containers, and the plan that one gets."""
