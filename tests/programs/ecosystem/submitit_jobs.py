"""Two jobs of submitit's local executor: `submitit_jobs.py FOLDER`; prints what they return."""

import sys

import submitit

import saferun

folder = sys.argv[1]
script = ["--set", "launcher=python", "job.py"]
executor = submitit.LocalExecutor(folder=f"{folder}/logs")
command = executor.submit(submitit.helpers.CommandFunction(["saferun", *script], cwd=folder))
function = executor.submit(saferun.run, script, cwd=folder, check=True)
print("command:", command.result().strip())
result = function.result()
print("function:", result.status, result.outcome, len(result.attempts))
print("log:", function.stdout().count("the job's line"))
