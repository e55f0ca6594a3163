"""The `baton` command, one module per noun. It is a program: nothing here is imported by users."""
