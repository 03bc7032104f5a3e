sys.path.remove(os.path.dirname(__file__))
del sys.modules["sitecustomize"]
import sitecustomize  # your own, if there is one; Python itself says nothing where there is none
