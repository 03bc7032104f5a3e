import os

from optuna_without_gpu import AcceleratorError, optuna, poison, show


def objective(trial):
    poison("CUDA error: an illegal memory access was encountered")
    raise AcceleratorError("CUDA error: an illegal memory access was encountered")


def work():
    study = optuna.load_study(study_name="s", storage="sqlite:///s.db")
    study.optimize(objective, n_trials=3, catch=(RuntimeError,))


study = optuna.create_study(study_name="s", storage="sqlite:///s.db")
child = os.fork()
if not child:
    work()
    os._exit(0)
print(os.waitpid(child, 0)[1])
show(study)
