"""The command line itself: commands found, words read, help and answers shown."""
