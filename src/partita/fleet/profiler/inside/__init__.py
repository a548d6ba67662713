"""What runs inside the job: the standard library alone, from Python 3.6 on.

Containers bring their own interpreter, so these files import nothing of Partita.
"""
