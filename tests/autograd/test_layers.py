"""PyTorch layers that access their weights in unusual ways."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from toys import mean_square, module, update

import patrickstar as ps

from .zoo import WIDTH, Stack, assert_blocks_exact, linear, normal, normal_batches, tokens, train, trains


def recurrent(*args, layer=nn.LSTM, **options):
    return module(lambda m, x: m.layer(x)[0], layer=lambda: layer(*args, batch_first=True, **options))


def packed(m, x):
    """Call an LSTM with sequences of different lengths."""
    sequences = pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
    return pad_packed_sequence(m.layer(sequences)[0], batch_first=True)[0]


def attention(need_weights, **options):
    def build():
        return nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)

    return module(lambda m, x: m.attention(x, x, x, need_weights=need_weights)[0], attention=build)


def decoder():
    return nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)


class ChannelsLast(nn.Sequential):
    """Layers with input shape (batch, channels, positions)."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def encoder_layer():
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)


def encoder():
    return nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)


LAYERS = {
    "LSTM": recurrent(WIDTH, WIDTH, 2),
    "LSTM, both ways": recurrent(WIDTH, WIDTH // 2, bidirectional=True),
    "LSTM, projected": recurrent(WIDTH, 2 * WIDTH, proj_size=WIDTH),
    "LSTM, packed": module(packed, layer=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "GRU": recurrent(WIDTH, WIDTH, 2, layer=nn.GRU),
    "attention": attention(need_weights=False),
    "attention with weights": attention(need_weights=True, dropout=0.1),
    "attention, projections apart": attention(need_weights=True, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True),
    "transformer encoder": encoder,
    "transformer decoder": module(lambda m, x: m.layer(x, torch.tanh(x)), layer=decoder),
    "convolutions and batch norm": lambda: ChannelsLast(
        nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Conv1d(WIDTH, WIDTH, 1)
    ),
    "group norm": lambda: ChannelsLast(nn.GroupNorm(2, WIDTH), nn.Conv1d(WIDTH, WIDTH, 1, groups=2)),
    "bilinear, PReLU": module(
        lambda m, x: m.slopes(m.bilinear(x, torch.tanh(x))),
        bilinear=lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
        slopes=lambda: nn.PReLU(3),
    ),
}


pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


@pytest.mark.parametrize("layer", LAYERS)
def test_layer(layer, config, recomputing):
    assert_blocks_exact(LAYERS[layer], config, recomputing)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@trains(lambda layer: Stack([LAYERS[layer]()]))
def test_layer_in_eval_between_steps(trainer, optimizer, without_grad):
    """In eval mode the encoder takes a fused path that reads all weights in one native call."""
    for step in range(3):
        trainer.module.eval()
        with without_grad():
            outputs = [trainer(*batch).clone() for batch in normal_batches(2)]
        yield from (torch.tensor(output.tolist()) for output in outputs)
        trainer.module.train()
        yield from train(trainer, steps=1, first=step) if step < 2 else ()


def embed(m, ids):
    return m.body(m.words(ids) + m.locations(torch.arange(ids.shape[1])) + m.bag(ids)[:, None])


EMBEDDINGS = {
    "of three kinds": module(
        embed,
        words=lambda: nn.Embedding(11, WIDTH, padding_idx=0),
        locations=lambda: nn.Embedding(5, WIDTH),
        bag=lambda: nn.EmbeddingBag(11, WIDTH, mode="sum"),
        body=linear,
    ),
    "rescaled in forward": module(
        lambda m, ids: m.body(m.words(ids)), words=lambda: nn.Embedding(11, WIDTH, max_norm=1.0), body=linear
    ),
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_embeddings(kind, config):
    ps.testing.assert_exact(EMBEDDINGS[kind], [(tokens(11, 2, 5, seed=step),) for step in range(3)], config)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell], ids=lambda cell: cell.__name__)
def test_recurrent_cell_unrolled(cell, config):
    def forward(m, x):
        state = None
        for position in x.unbind(1):
            state = m.cell(position, state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    ps.testing.assert_exact(module(forward, cell=lambda: cell(WIDTH, WIDTH), head=linear), normal_batches(), config)


@trains(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))
def test_hidden_state_carried_from_step_to_step(trainer, optimizer):
    """Truncated back-propagation through time."""
    state = None
    for (x,) in normal_batches():
        output, state = trainer(x, state)
        state = tuple(each.detach() for each in state)
        yield update(trainer, mean_square(output))
    yield from state


def test_copies_of_attention_layers_call_their_own_forward():
    """Encoder layers take a fast path in inference."""
    x = normal(2, 3, WIDTH, seed=1)
    engine = ps.Engine(
        lambda: nn.Sequential(encoder_layer(), encoder_layer()),
        ps.Config(device="cpu", precision="fp32"),
        meter=ps.testing.NoMeter(),
    )
    copied, pickled = copy.deepcopy(engine.module).eval(), pickle.loads(pickle.dumps(engine.module)).eval()
    layer = engine.module[0]
    assert "forward" in vars(layer)
    engine.eval()
    with torch.no_grad():
        expected = engine(x)
        for module in (copied, pickled):
            assert torch.equal(module(x), expected)
            module[0].linear1.bias.add_(1)
            assert not torch.equal(module(x), expected) and torch.equal(engine(x), expected)
    engine.close()
    assert "forward" not in vars(layer)
