"""The commented plan that `dpsynth plan --init` writes; it verifies as it is."""

from pathlib import Path

from dpsynth.errors import UsageError, typed

STARTER = """\
# A plan for dpsynth. Everything that matters for privacy or for the result is in this file.
# `dpsynth plan` verifies it, `dpsynth run` does all of it.
version: 1
name: my-images                 # the run lands in runs/my-images

budget:
  epsilon: 1.0                  # what may be spent in total: smaller is more private
  delta: 1e-6                   # keep it below 1/(10 * capacity)
  # unit: {column: patient, most: 8}                # protect all images of one patient together:
  #                             a column of metadata.csv; capacity then counts patients

private:
  # Where the private records lie. An image folder (or zip) with metadata.csv (file_name,label)
  # or one subfolder a class. Paths are taken from this file's folder.
  source: {kind: folder, path: private-images}
  # Or an IDX pair:  {kind: idx, images: train-images.gz, labels: train-labels.gz}
  # Or a NumPy file: {kind: npz, path: records.npz}
  capacity: 10000               # declared number of records (public, round, never counted)
  image: {height: 28, width: 28, channels: 1}       # every record has this shape
  classes: [cat, dog]           # declared; digits need quotes: ["0", "1"]
  # Records held out for `evaluate`, each by its own hash, never by position:
  held_out: {by: hash, fraction: 0.1}
  # public: true                # only for demonstrations: shows values of private records
  # cap: {epsilon: 3.0, delta: 1e-5}                # limit on all runs on this data together

public:                         # public images in the same shape, to learn codes from
  - {kind: letters, count: 20000}                   # glyphs: the same, bent and thickened more
  # - {kind: folder, path: public-images}

representation:
  kind: autoencoder             # or pca, quicker and coarser
  code: 32                      # numbers in a code

stages:
  moments:                      # a noisy release of class counts, sums and second moments
    covariance: class           # shared: one covariance for all classes (rare classes)
    # cells: {}                 # moments by cells inside each class, in rounds: better images where
    #                             classes have hundreds of records; needs covariance: class
    spares: 0                   # 1: a crash may use a second slot of each round; costs noise always
  # train:                      # DP-SGD on top; needs `sampling: {method: flow}`
  #   weight: 0.1               # against stages.moments.weight (1.0), in noise
  #   rate: 0.02
  #   steps: 500
  #   optimizer: {kind: adam}   # or sgd, adamw; schedules too: docs/training.md
  # evaluation: {weight: 0.1}   # releases the accuracy on held-out records, with noise, after
  #                             sampling: `dpsynth release-evaluation`

# distillation: {steps: 3000}   # teach the public flow the released moments
# method: merf                  # another method, by this one line: docs/methods.md

sampling:
  method: release               # flow: draw by the flow model
  count: 5000
  # sharpen: public             # decoded images are soft: as sharp as public ones again
  # augment: {}                 # move each image a little (for classifiers); unmoved ones come too
"""


def write_starter(path: Path) -> Path:
    """Write the starter plan to `path`. Raises UsageError when something is there already."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTER)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already and is left as it is", hint=typed("dpsynth", "plan", path)
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path
