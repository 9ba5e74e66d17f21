"""torch's own tables of modules and operators, run through the stack and compared with eager."""
