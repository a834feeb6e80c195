"""Chess tasks: play (`chess_policy`, P:), predict the environment's answer (`chess_env`, A:), or both (`chess`)."""
