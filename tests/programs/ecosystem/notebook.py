"""Run cells in a real kernel: `notebook.py FOLDER`; prints the outputs of each cell as JSON.

The kernel is interrupted, as by a notebook's stop button, when the job of the second cell is up.
"""

import asyncio
import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

folder = Path(sys.argv[1])
FIRST = """import saferun
result = saferun.run(['job.py'], settings={'launcher': 'python'})
result.status"""
SECOND = "saferun.run(['job.py', 'stay'], settings={'launcher': 'python'})"
THIRD = "'still alive'"


async def interrupt(client: NotebookClient) -> None:
    while not list(folder.glob("up-*")):
        await asyncio.sleep(0.05)
    await client.km.interrupt_kernel()


async def main() -> None:
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in (FIRST, SECOND, THIRD)]
    client = NotebookClient(notebook, resources={"metadata": {"path": str(folder)}}, timeout=300)
    async with client.async_setup_kernel():
        await client.async_execute_cell(notebook.cells[0], 0)
        stop = asyncio.create_task(interrupt(client))
        try:
            await client.async_execute_cell(notebook.cells[1], 1)
        except CellExecutionError as error:
            print(json.dumps({"raised": error.ename}))
        await stop
        await client.async_execute_cell(notebook.cells[2], 2)
    for cell in (notebook.cells[0], notebook.cells[2]):
        print(json.dumps([dict(output) for output in cell.outputs]))


asyncio.run(main())
