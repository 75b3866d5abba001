"""The one place for numbers: estimates with intervals, the bootstrap, what measures are called, tables, colours."""
