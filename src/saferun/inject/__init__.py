"""The child's side: loaded by site/sitecustomize.py inside the job's own Python.

Standard library only, any Python from 3.9 on, and nothing here imports the rest of saferun:
the job's Python may have no saferun at all. See contract.py for what travels in and out.
"""
