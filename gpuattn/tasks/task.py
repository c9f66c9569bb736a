"""What differs between runs that translate and runs that learn a text; all else is shared."""

import abc

DATA_FILES = ("source", "target", "valid_source", "valid_target", "lm", "valid_lm")
MOST_BEAMS = 200  # a wider search takes memory and translates no better


class Task(abc.ABC):
    """The data of a run, its model, and how it is judged.

    ``corpus``: has ``loader(epoch)``, ``valid_batches()``, ``tokenizer``, ``facts`` (sentences on
    what was read), ``warnings`` and ``fingerprint``. ``model``: the Module that is trained.
    ``tokenizer``: the run's, or None to make one.
    """

    def __init__(self, config, tokenizer=None):
        self.config = config
        self.corpus = self.new_corpus(config, tokenizer)
        self.model = self.new_model(config, self.corpus.tokenizer)
        self.user = self.new_user(config, self.model, self.corpus.tokenizer)
        self.model.checkpoint = config.checkpoint

    def rebatch(self, config):
        """Go on with batches as another config has them, which differs in nothing else."""
        self.config = config
        self.corpus.rebatch(config)

    new_corpus: type  # (config, tokenizer or None)
    new_user: type  # (config, model, tokenizer, metrics=None): what a trained model is used with
    command: str  # likewise

    @staticmethod
    @abc.abstractmethod
    def new_model(config, tokenizer):
        """Return the model that a run begins with."""

    @staticmethod
    @abc.abstractmethod
    def describe_data(config):
        """Return what a run learns from, in words."""

    @abc.abstractmethod
    def describe_model(self):
        """Return how large the model is, in words."""

    @abc.abstractmethod
    def describe_update(self):
        """Return how much an update takes, in words."""

    @abc.abstractmethod
    def fixed_shape(self, batch):
        """Return a batch that is as good, in one of few shapes: for CUDA graphs."""

    @abc.abstractmethod
    def flops(self, batches):
        """Return the model FLOPs of steps on batches of the corpus, see ``models.flops``."""

    @abc.abstractmethod
    def loss(self, batch, label_smoothing=0.0, dloss=None):
        """Return the mean loss per target token of a batch on the model's device, as a Tensor.

        ``dloss``: what backward will be called with, see ``ops.loss.cross_entropy``.
        """

    @abc.abstractmethod
    def evaluate(self, folder, update, loss, stop):
        """Use the model as it is; return (figures, texts to show), or None once ``stop()`` is true.

        Figures go into the row of metrics, ``score`` among them: the more the better. ``folder``:
        where what the model wrote is kept. ``loss``: that of the validation batches.
        """
