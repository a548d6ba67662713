"""Files that start the processes of a plan on other people's schedulers. Nothing is submitted."""
