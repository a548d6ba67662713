"""Pictures and files that show a Timeline: they draw what it says and compute nothing new."""
