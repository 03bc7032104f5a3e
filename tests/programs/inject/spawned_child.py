import _frozen_importlib
import multiprocessing


def report_finder(queue):
    queue.put("saferun" in _frozen_importlib._find_spec.__module__)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=report_finder, args=(queue,))
    child.start()
    print(queue.get(timeout=60))
    child.join()
