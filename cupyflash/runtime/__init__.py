"""The path of a call, one file per hop; docs/design notes: problem, plan, variant, params, compile, launch."""
