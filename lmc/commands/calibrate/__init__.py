"""`lmc calibrate`: measures whether blending is worth it for a model and documents of one's own.

`command` is the command line, `prompts` makes prompts from a folder of texts, `measure` prefills each in all ways, and
`verdict` decides. The settings that it recommends are printed, and a report is written if one is asked for.
"""
