"""Trains, resumes, translates and reads what a run wrote: a program outside the package, as docs/api.md shows it."""

from dist_transformer import Translator, UserError, evaluate, load_config, prepare, train

config = load_config("my.yaml", "training.max_steps=4")
print("prepared corpus:", prepare(config))
run = train(config, ranks=2)
print(run.state, run.step, run.checkpoint)
run = train(load_config("my.yaml", "training.max_steps=6"))  # resumes, on one rank
for record in run.metrics("train"):
    print(record["step"], record["loss"])
translator = Translator(run.path, beam_size=1)
print(translator("The house is blue."), *translator.translate(["One.", "", "Two."]), sep="\n")
print(evaluate(run.path, beam_size=1)["bleu"], run.scores()["test"]["bleu_signature"])
try:
    train(config, ranks=99)
except UserError as error:
    print(error)
