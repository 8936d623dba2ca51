"""The launcher: which workers should run, what is done when one ends, what is shown. Mirrors launcher.c."""
