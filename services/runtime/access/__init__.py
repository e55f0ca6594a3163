"""Authorization of calls: permissions, the rules of methods, and the guard that checks both."""
