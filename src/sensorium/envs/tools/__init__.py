"""Tools that a model may call while it answers a question: what they are, how a call is written, and some of our own.

``protocol`` says what a tool is, ``calls`` reads calls out of a response, ``arguments`` checks them, ``toolbox`` runs them
under a deadline, ``environment`` plays a question with them, ``geo3k`` plays the geometry example of slime.
"""
