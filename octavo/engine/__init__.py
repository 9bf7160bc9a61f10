"""From prompts to texts: the front end (input and output processing) around the engine core.

Read core.py first: it is the loop. llm_engine.py puts the front end around it.
"""
