"""What `bench/quality.py` is made of: prompts, ways of answering them, measurements, and the page that shows them."""
