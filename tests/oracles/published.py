"""Inputs and results printed in public test suites of transducer losses, each confirmed by path enumeration.

Values only, as printed there; atol covers the digits and the precision in which they were computed.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Example:
    """One batch: utterance b has frames[b] frames and all of labels[b]; frames beyond that are padding."""

    name: str
    logits: Array  # [B, T, U1, V], for TDT the durations after the V tokens
    labels: tuple[tuple[int, ...], ...]
    frames: tuple[int, ...]
    blank: int
    losses: Array  # [B]
    losses_atol: float
    logit_gradient: Array | None = None  # d sum(losses) / d logits
    logit_gradient_atol: float = 0.0
    logprob_gradient: Array | None = None  # d sum(losses) / d log_softmax(logits): minus the arc posteriors
    logprob_gradient_atol: float = 0.0
    loss: Literal["rnnt", "tdt", "monotonic"] = "rnnt"  # monotonic: the last symbol may be a label
    durations: tuple[int, ...] = ()
    sigma: float = 0.0


_SMALL = np.array(
    [
        [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
        [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]],
    ]
)

_SMALL_LOGPROB_GRADIENT = np.array(
    [
        [
            [-0.308198071906, -0.6918019280939998, 0, 0, 0],
            [-0.308198071906, 0, -0.3836038561880001, 0, 0],
            [-0.3836038561880001, 0, 0, 0, 0],
        ],
        [
            [0, -0.308198071906, 0, 0, 0],
            [0, 0, -0.6163961438119995, 0, 0],
            [-0.9999999999999991, 0, 0, 0, 0],
        ],
    ]
)

# github.com/HawkAaron/warp-transducer, pytorch_binding/test/test.py (gradient by logits)
# github.com/1ytic/warp-rnnt, pytorch_binding/warp_rnnt/test.py (gradient by log-probabilities)
SMALL = Example(
    name="small",
    logits=_SMALL[None],
    labels=((1, 2),),
    frames=(2,),
    blank=0,
    losses=np.array([4.495666]),
    losses_atol=1e-6,
    logit_gradient=np.array(
        [
            [
                [
                    [-0.13116688, -0.3999269, 0.17703125, 0.17703125, 0.17703125],
                    [-0.18572757, 0.12247056, -0.18168412, 0.12247056, 0.12247056],
                    [-0.32091254, 0.06269141, 0.06928472, 0.12624499, 0.06269141],
                ],
                [
                    [0.05456069, -0.21824276, 0.05456069, 0.05456069, 0.05456069],
                    [0.12073959, 0.12073959, -0.48295835, 0.12073959, 0.12073959],
                    [-0.6925882, 0.16871116, 0.18645467, 0.16871116, 0.16871116],
                ],
            ]
        ]
    ),
    logprob_gradient=_SMALL_LOGPROB_GRADIENT[None],
    logit_gradient_atol=2e-7,
    logprob_gradient_atol=1e-12,
)

# github.com/pytorch/audio, test/torchaudio_unittest/rnnt/utils.py
SMALL_BLANK_LAST = Example(
    name="small_blank_last",
    logits=_SMALL[None],
    labels=((1, 2),),
    frames=(2,),
    blank=4,
    losses=np.array([5.09566688538]),
    losses_atol=2e-7,
    logit_gradient=np.array(
        [
            [
                [
                    [0.17703132, -0.39992708, 0.17703132, 0.17703132, -0.13116692],
                    [0.12247062, 0.12247062, -0.181684, 0.12247062, -0.1857276],
                    [0.06269141, 0.06269141, 0.06928471, 0.12624498, -0.32091248],
                ],
                [
                    [0.05456069, -0.2182428, 0.05456069, 0.05456069, 0.05456069],
                    [0.12073967, 0.12073967, -0.48295838, 0.12073967, 0.12073967],
                    [0.30741188, 0.16871123, 0.18645471, 0.16871123, -0.83128875],
                ],
            ]
        ]
    ),
    logit_gradient_atol=5e-7,
)

# github.com/HawkAaron/warp-transducer, pytorch_binding/test/test.py (gradient by logits)
# and tests/test_cpu.cpp (gradient by log-probabilities)
TWO_UTTERANCES = Example(
    name="two_utterances",
    logits=np.array(
        [
            [
                [
                    [0.06535690384862791, 0.7875301411923206, 0.08159176605666074],
                    [0.5297155426466327, 0.7506749639230854, 0.7541348379087998],
                    [0.6097641124736383, 0.8681404965673826, 0.6225318186056529],
                ],
                [
                    [0.6685222872103057, 0.8580392805336061, 0.16453892311765583],
                    [0.989779515236694, 0.944298460961015, 0.6031678586829663],
                    [0.9467833543605416, 0.666202507295747, 0.28688179752461884],
                ],
                [
                    [0.09418426230195986, 0.3666735970751962, 0.736168049462793],
                    [0.1666804425271342, 0.7141542198635192, 0.3993997272216727],
                    [0.5359823524146038, 0.29182076440286386, 0.6126422611507932],
                ],
                [
                    [0.3242405528768486, 0.8007644367291621, 0.5241057606558068],
                    [0.779194617063042, 0.18331417220174862, 0.113745182072432],
                    [0.24022162381327106, 0.3394695622533106, 0.1341595066017014],
                ],
            ],
            [
                [
                    [0.5055615569388828, 0.051597282072282646, 0.6402903936686337],
                    [0.43073311517251, 0.8294731834714112, 0.1774668847323424],
                    [0.3207001991262245, 0.04288308912457006, 0.30280282975568984],
                ],
                [
                    [0.6751777088333762, 0.569537369330242, 0.5584738347504452],
                    [0.08313242153985256, 0.06016544344162322, 0.10795752845152584],
                    [0.7486153608562472, 0.943918041459349, 0.4863558118797222],
                ],
                [
                    [0.4181986264486809, 0.6524078485043804, 0.024242983423721887],
                    [0.13458171554507403, 0.3663418070512402, 0.2958297395361563],
                    [0.9236695822497084, 0.6899291482654177, 0.7418981733448822],
                ],
                [
                    [0.25000547599982104, 0.6034295486281007, 0.9872887878887768],
                    [0.5926057265215715, 0.8846724004467684, 0.5434495396894328],
                    [0.6607698886038497, 0.3771277082495921, 0.3580209022231813],
                ],
            ],
        ]
    ),
    labels=((1, 2), (1, 1)),
    frames=(4, 4),
    blank=0,
    losses=np.array([4.2806528590890736, 3.9384369822503591]),
    losses_atol=1e-12,
    logit_gradient=np.array(
        [
            [
                [
                    [-1.86843902e-01, -6.25548810e-02, 2.49398798e-01],
                    [-2.03376666e-01, 2.02399328e-01, 9.77333169e-04],
                    [-1.41016081e-01, 7.91234672e-02, 6.18926100e-02],
                ],
                [
                    [-1.15517676e-02, -8.12802389e-02, 9.28319991e-02],
                    [-1.54257029e-01, 2.29432687e-01, -7.51756504e-02],
                    [-2.46593088e-01, 1.46404594e-01, 1.00188486e-01],
                ],
                [
                    [-1.29182907e-02, -6.15932420e-02, 7.45115355e-02],
                    [-5.59857301e-02, 2.19830811e-01, -1.63845062e-01],
                    [-4.97626871e-01, 2.09239945e-01, 2.88386941e-01],
                ],
                [
                    [1.36048580e-02, -3.02196294e-02, 1.66147724e-02],
                    [1.13924511e-01, 6.27811998e-02, -1.76705718e-01],
                    [-6.67078257e-01, 3.67658824e-01, 2.99419403e-01],
                ],
            ],
            [
                [
                    [-3.56343776e-01, -5.53474613e-02, 4.11691219e-01],
                    [-9.69219357e-02, 2.94591039e-02, 6.74628317e-02],
                    [-6.35175705e-02, 2.76544970e-02, 3.58630717e-02],
                ],
                [
                    [-1.54499024e-01, -7.39420280e-02, 2.28441030e-01],
                    [-1.66789949e-01, -8.78955179e-05, 1.66877866e-01],
                    [-1.72369644e-01, 1.05565332e-01, 6.68043196e-02],
                ],
                [
                    [2.38748826e-02, -1.18255816e-01, 9.43809375e-02],
                    [-1.04707085e-01, -1.08934477e-01, 2.13641584e-01],
                    [-3.69844258e-01, 1.80118099e-01, 1.89726159e-01],
                ],
                [
                    [2.57137045e-02, -7.94617534e-02, 5.37480488e-02],
                    [1.22328237e-01, -2.38788679e-01, 1.16460443e-01],
                    [-5.98686993e-01, 3.02203178e-01, 2.96483815e-01],
                ],
            ],
        ]
    ),
    logprob_gradient=np.array(
        [
            [
                [[-0.432226, -0.567774, 0], [-0.365650, 0, -0.202123], [-0.202123, 0, 0]],
                [[-0.165217, -0.267010, 0], [-0.394365, 0, -0.238294], [-0.440418, 0, 0]],
                [[-0.052130, -0.113087, 0], [-0.183138, 0, -0.324314], [-0.764732, 0, 0]],
                [[0, -0.052130, 0], [0, 0, -0.235268], [-1, 0, 0]],
            ],
            [
                [[-0.716142, -0.283858, 0], [-0.183829, -0.100028, 0], [-0.100028, 0, 0]],
                [[-0.411218, -0.304924, 0], [-0.329576, -0.159178, 0], [-0.259206, 0, 0]],
                [[-0.116076, -0.295142, 0], [-0.286533, -0.338184, 0], [-0.597390, 0, 0]],
                [[0, -0.116076, 0], [0, -0.402610, 0], [-1, 0, 0]],
            ],
        ]
    ),
    logit_gradient_atol=2e-7,
    logprob_gradient_atol=1e-6,
)

# the next three: github.com/1ytic/warp-rnnt, pytorch_binding/warp_rnnt/test.py
ONE_FRAME = Example(
    name="one_frame",
    logits=_SMALL[None, :1],
    labels=((1, 2),),
    frames=(1,),
    blank=0,
    losses=np.array([4.274244594423859]),
    losses_atol=1e-12,
    logprob_gradient=np.array([[[[0, -1, 0, 0, 0], [0, 0, -1, 0, 0], [-1, 0, 0, 0, 0]]]], np.float64),
    logprob_gradient_atol=1e-12,
)

NO_LABELS = Example(
    name="no_labels",
    logits=_SMALL[None, :1, :1],
    labels=((),),
    frames=(1,),
    blank=0,
    losses=np.array([1.7314291957733714]),
    losses_atol=1e-12,
    logprob_gradient=np.array([[[[-1, 0, 0, 0, 0]]]], np.float64),
    logprob_gradient_atol=1e-12,
)

RAGGED = Example(
    name="ragged",
    logits=np.stack([np.concatenate([_SMALL, np.zeros((1, 3, 5))]), np.concatenate([_SMALL, _SMALL[:1]])]),
    labels=((1, 2), (1, 2)),
    frames=(2, 3),
    blank=0,
    losses=np.array([4.495666773770733, 5.7367250428101615]),
    losses_atol=1e-12,
    logprob_gradient=np.stack(
        [
            np.concatenate([_SMALL_LOGPROB_GRADIENT, np.zeros((1, 3, 5))]),
            [
                [
                    [-0.45920877, -0.54079123, 0, 0, 0],
                    [-0.32392462, 0, -0.21686661, 0, 0],
                    [-0.21686661, 0, 0, 0, 0],
                ],
                [
                    [-0.13528414, -0.32392462, 0, 0, 0],
                    [-0.29937584, 0, -0.3484734, 0, 0],
                    [-0.56534001, 0, 0, 0, 0],
                ],
                [[0, -0.13528414, 0, 0, 0], [0, 0, -0.43465999, 0, 0], [-1, 0, 0, 0, 0]],
            ],
        ]
    ),
    logprob_gradient_atol=1e-8,
)

# github.com/NVIDIA/NeMo, tests/collections/asr/numba/rnnt_loss/test_rnnt_pytorch.py
TDT = Example(
    name="tdt",
    loss="tdt",
    logits=np.zeros((1, 3, 2, 7)),
    labels=((0,),),
    frames=(3,),
    blank=3,
    durations=(0, 1, 2),
    sigma=0.05,
    losses=np.array([4.155739]),
    losses_atol=1e-6,
    logit_gradient=np.array(
        [
            [
                [
                    [-0.64962804, 0.25, 0.25, 0.14962798, 0.2672583, -0.16792619, -0.09933221],
                    [0.01651875, 0.01651875, 0.01651875, -0.04955626, 0.022025, -0.01227201, -0.009753],
                ],
                [
                    [-0.04892651, 0.01714851, 0.01714851, 0.01462949, -0.01143234, -0.01143234, 0.02286467],
                    [0.12531489, 0.12531489, 0.12531489, -0.37594467, 0.16708651, 0.13027048, -0.29735702],
                ],
                [
                    [-0.02572276, 0.00857425, 0.00857425, 0.00857425, -0.02286468, 0.01143234, 0.01143234],
                    [0.13388914, 0.13388914, 0.13388914, -0.40166742, 0.17851885, -0.35703772, 0.17851885],
                ],
            ]
        ]
    ),
    logit_gradient_atol=1e-7,
)

# github.com/SimBe195/monotonic-rnnt, README.md; the softmax of these logits is the table printed there
MONOTONIC = Example(
    name="monotonic",
    loss="monotonic",
    logits=np.log(
        [
            [
                [[0.6, 0.3, 0.1], [0.7, 0.1, 0.2], [0.5, 0.1, 0.4]],
                [[0.5, 0.4, 0.1], [0.5, 0.1, 0.4], [0.8, 0.1, 0.1]],
                [[0.4, 0.3, 0.3], [0.5, 0.1, 0.4], [0.7, 0.2, 0.1]],
                [[0.8, 0.1, 0.1], [0.3, 0.1, 0.6], [0.8, 0.1, 0.1]],
            ]
        ]
    ),
    labels=((1, 2),),
    frames=(4,),
    blank=0,
    losses=np.array([1.0134]),
    losses_atol=1e-4,
    logit_gradient=np.array(
        [
            [
                [[0.04, -0.14, 0.1], [0, 0, 0], [0, 0, 0]],
                [[0.13, -0.19, 0.06], [-0.04, 0.04, -0.01], [0, 0, 0]],
                [[0.06, -0.1, 0.04], [0.01, 0.07, -0.08], [-0.06, 0.04, 0.02]],
                [[0, 0, 0], [0.14, 0.05, -0.19], [-0.11, 0.05, 0.05]],
            ]
        ]
    ),
    logit_gradient_atol=5e-3,
)
MONOTONIC_PATH_PROBABILITIES = (0.0540, 0.0720, 0.0768, 0.0450, 0.0480, 0.0672)

EXAMPLES = (SMALL, SMALL_BLANK_LAST, TWO_UTTERANCES, ONE_FRAME, NO_LABELS, RAGGED, TDT, MONOTONIC)

# github.com/google-research/last, tests/weight_fns_test.py: HAT's log-probabilities of [blank, labels] logits
HAT_LOGITS = np.array([[2.0, 0.0, 1.0], [7.0, 3.0, 5.0]])
HAT_LOGPROBS = np.array([[-0.126928, -3.44019, -2.44019], [-0.000912, -9.12784, -7.12784]])
HAT_LOGPROBS_ATOL = 1e-6
