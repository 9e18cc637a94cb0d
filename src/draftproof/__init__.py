"""draftproof: from a target LLM and prompts to an EAGLE-3 draft that is proven to speed it up.

The line is `recipe -> plan -> [gate -> stage -> artifact] -> report`; `pipeline.py` shows it whole.
"""

__version__ = "0.1.0"
