"""Decoding steps in few launches instead of one for each op; ``row_step.step_of`` chooses one."""
