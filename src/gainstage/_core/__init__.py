"""The core: variables and the bridge to pure functions, gradients, rules, and the step."""
