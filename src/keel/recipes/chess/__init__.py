"""Chess: to play (`chess_policy`, P:), to be the environment (`chess_env`, A:), and both (`chess`)."""
