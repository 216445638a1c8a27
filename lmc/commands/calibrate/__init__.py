"""`lmc calibrate`: measures whether blending is worth it for a user's model and documents.

`command` is the command line. `prompts` makes prompts from a folder of texts, `measure` prefills each prompt in all
modes, and `verdict` decides. The command prints the recommended settings, and writes a report with `--report`.
"""
