"""The core: variables and the bridge to pure functions, gradients, and the step."""
