"""PyTorch layers that access their weights in unusual ways."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine

from .zoo import WIDTH, Stack, assert_blocks_exact, linear, normal_batches, tokens, train, update


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class PackedRecurrent(nn.Module):
    """Sequences of different lengths in a PackedSequence."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        packed = pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Attention(nn.Module):
    def __init__(self, need_weights, **kwargs):
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **kwargs), need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.layer(x, torch.tanh(x))


class ChannelsLast(nn.Module):
    """A layer with input shape (batch, channels, positions)."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x.transpose(1, 2)).transpose(1, 2)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear, self.slopes = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.PReLU(3)

    def forward(self, x):
        return self.slopes(self.bilinear(x, torch.tanh(x)))


def encoder_layer():
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)


def encoder():
    return nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)


LAYERS = {
    "LSTM": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)),
    "LSTM, both ways": lambda: Recurrent(nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)),
    "LSTM, projected": lambda: Recurrent(nn.LSTM(WIDTH, 2 * WIDTH, proj_size=WIDTH, batch_first=True)),
    "LSTM, packed": PackedRecurrent,
    "GRU": lambda: Recurrent(nn.GRU(WIDTH, WIDTH, 2, batch_first=True)),
    "attention": lambda: Attention(need_weights=False),
    "attention with weights": lambda: Attention(need_weights=True, dropout=0.1),
    "attention, projections apart": lambda: Attention(need_weights=True, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True),
    "transformer encoder": encoder,
    "transformer decoder": Decoder,
    "convolutions and batch norm": lambda: ChannelsLast(
        nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 1)
    ),
    "group norm": lambda: ChannelsLast(nn.GroupNorm(2, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1, groups=2)),
    "bilinear, PReLU": Pair,
}


pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


@pytest.mark.parametrize("layer", LAYERS)
def test_layer(layer, config, checkpointing):
    assert_blocks_exact(LAYERS[layer], config, checkpointing)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_layer_in_eval_between_steps(layer, without_grad, config):
    """In eval mode the encoder takes a fused path that reads all weights in one native call."""

    def evaluate(trainer):
        trainer.module.eval()
        with without_grad():
            outputs = [trainer(*batch).clone() for batch in normal_batches(2)]
        trainer.module.train()
        return [torch.tensor(output.tolist()) for output in outputs]

    def script(trainer, optimizer):
        seen = evaluate(trainer)
        for step in range(2):
            seen += train(trainer, steps=1, first=step) + evaluate(trainer)
        return seen

    testing.compare(lambda: Stack([LAYERS[layer]()]), config, script)


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.locations = nn.Embedding(11, WIDTH, padding_idx=0), nn.Embedding(5, WIDTH)
        self.bag, self.body = nn.EmbeddingBag(11, WIDTH, mode="sum"), linear()

    def forward(self, ids):
        x = self.words(ids) + self.locations(torch.arange(ids.shape[1])) + self.bag(ids)[:, None]
        return self.body(x)


def test_embeddings(config):
    testing.assert_exact(Embeddings, [(tokens(11, 2, 5, seed=step),) for step in range(3)], config)


class EmbeddingRenormalised(nn.Module):
    """Embedding with max_norm, which writes to its weight in forward."""

    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(11, WIDTH, max_norm=1.0), linear()

    def forward(self, ids):
        return self.body(self.words(ids))


def test_embedding_that_rescales_its_weight(config):
    testing.assert_exact(EmbeddingRenormalised, [(tokens(11, 2, 5, seed=step),) for step in range(3)], config)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell], ids=lambda cell: cell.__name__)
def test_recurrent_cell_unrolled(cell, config):
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = cell(WIDTH, WIDTH), linear()

        def forward(self, x):
            state = None
            for position in x.unbind(1):
                state = self.cell(position, state)
            return self.head(state[0] if isinstance(state, tuple) else state)

    testing.assert_exact(Unrolled, normal_batches(), config)


def test_hidden_state_carried_from_step_to_step(config):
    """Truncated back-propagation through time."""

    def script(trainer, optimizer):
        losses, state = [], None
        for (x,) in normal_batches():
            output, state = trainer(x, state)
            state = tuple(each.detach() for each in state)
            losses.append(update(trainer, optimizer, mean_square(output)))
        return [*losses, *state]

    testing.compare(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), config, script)


class TwoLayers(nn.Module):
    """Encoder layers, which take a fast path in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)))

    def forward(self, x):
        return self.layers(x)


def test_copies_of_attention_layers_call_their_own_forward():
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    engine = Engine(TwoLayers, ps.Config(device="cpu", precision="fp32"), meter=testing.NoMeter())
    copied, pickled = copy.deepcopy(engine.module).eval(), pickle.loads(pickle.dumps(engine.module)).eval()
    layer = engine.module.layers[0]
    assert "forward" in vars(layer)
    engine.eval()
    with torch.no_grad():
        expected = engine(x)
        for module in (copied, pickled):
            assert torch.equal(module(x), expected)
            module.layers[0].linear1.bias.add_(1)
            assert not torch.equal(module(x), expected) and torch.equal(engine(x), expected)
    engine.close()
    assert "forward" not in vars(layer)
