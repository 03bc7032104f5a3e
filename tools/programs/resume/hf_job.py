"""A script with the Hugging Face Trainer and HfArgumentParser, as those of transformers."""

import small_model
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()


class Paced(TrainerCallback):
    pace = small_model.Pace()

    def on_step_end(self, args, state, control, **others):
        self.pace.wait()
        if state.is_world_process_zero and state.global_step % 10 == 0:
            print(f"step {state.global_step}", flush=True)


trainer = Trainer(small_model.Model(0.1), args, train_dataset=small_model.Data(100_000))
trainer.add_callback(Paced())
result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
if trainer.is_world_process_zero():
    last = trainer.state.log_history[-2]["loss"]
    small_model.report(trainer.accelerator.unwrap_model(trainer.model), last)
