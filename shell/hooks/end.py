sys.path.remove(os.path.dirname(__file__))
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401 (the one of your own; Python knows what it means if there is none)
