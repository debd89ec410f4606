"""GLM-5 as pure functions of (params, tokens).

Dimension key, the same everywhere: B batch, T query positions, S key positions, D hidden, N heads,
P no-rope dims, R rope dims (r = R/2), K of a q or k head = P + R, H value dims, Q query rank, C latent
rank, L = C + R, E experts, F expert width, V vocabulary, I indexer heads, J indexer dims; K of a
selection is the number of selected keys, K of a routing the experts per token, M = B · T rows.
"""

from glm5_jax.model.glm5 import GLM5 as GLM5
from glm5_jax.model.glm5 import Draft as Draft
from glm5_jax.model.glm5 import ModelOutput as ModelOutput
from glm5_jax.model.glm5 import draft as draft
from glm5_jax.model.glm5 import forward as forward
from glm5_jax.model.glm5 import head_of as head_of
from glm5_jax.model.glm5 import init_cache as init_cache
from glm5_jax.model.glm5 import with_successor as with_successor
from glm5_jax.model.params import abstract_params as abstract_params
from glm5_jax.model.params import count_params as count_params
from glm5_jax.model.params import init_params as init_params
from glm5_jax.model.params import logical_axes as logical_axes
