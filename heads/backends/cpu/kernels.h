/* Types and functions of the CPU kernels: decoder layers over a few rows in float32, and drafting with them.
 *
 * A step of 1 to 16 rows should cost the time to read the weights once. Libraries pack a weight again for each product,
 * which for few rows costs several times the arithmetic, and the dispatch of twenty small operations per layer costs as
 * much again. Here weights and keys are stored packed, and a layer is one call.
 *
 * Every sum runs in an order that depends only on its own row. So a row's result is the same, to the bit, whatever the
 * other rows are.
 *
 * Letters: B batch rows, N tokens per batch row, R = B * N rows, K inputs, O outputs, D hidden, I intermediate width, H
 * query heads, Hkv key heads, G = H / Hkv, d head dimension, E visible slots, S slots per batch row, V columns of a
 * draft's logits.
 */

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const void *weight; /* packed: block b holds columns b * BLOCK .. of W^T as (K, BLOCK), the last padded with 0 */
    const float *bias;  /* (O) or NULL */
    int64_t K, O, half; /* half: weights in bfloat16, allowed for a draft */
} Product;

typedef struct { /* around a sublayer, over the tokens of a batch row; `heads.block.convolution` */
    Product project;   /* from the sublayer's normalized input to (2, taps, groups) */
    const float *base; /* (2, taps, D) */
    int64_t taps, groups; /* taps: 0 for none */
} Convolution;

typedef struct {
    Product qkv, out, gate_up, down;
    Convolution attention_conv, feedforward_conv;
    const float *attention_norm, *feedforward_norm; /* (D); the first NULL if the input is already normalized */
    const float *head_norm;                         /* (H + Hkv, d) or NULL */
    float attention_eps, feedforward_eps, head_eps, scale;
    int64_t H, Hkv, d, window; /* window: 0 for none */
} Layer;

typedef struct {
    float *x;                     /* (R, D) the residual stream, updated in place */
    const float *input;           /* (R, K of qkv), used if the layer has no attention norm */
    const float *cosines, *sines; /* (positions, d), the first half of the sines negated */
    const int64_t *positions;     /* (R) */
    const int64_t *slots;         /* (R), in each batch row; -1: the token is padding, and its key is not stored */
    const float *mask, *near_mask; /* (B, N, E), added to scores, the second in layers with a window; */
                                   /* NULL: a token sees the slots up to its own, within the window */
    float *scratch;               /* `scratch_size` floats */
    int64_t B, first_row, N, D, E, S, threads;
} Pass;

void multiply(const Product *p, const float *x, int64_t x_stride, const float *residual, float *y, int64_t R,
              int64_t threads);
void normalise_rows(const float *x, int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride,
                    int64_t R, int64_t n);
int64_t scratch_size(const Layer *l, int64_t B, int64_t N, int64_t D, int64_t E);
void decoder_layers(const Layer *layers, int64_t count, const Pass *p, float *keys, int64_t key_stride, float *values,
                    int64_t value_stride, const int64_t *aux_layer_ids, int64_t num_aux_layers, float *aux_hidden_states);
void move_slots(float *keys, float *values, const int64_t *from, const int64_t *to, float *room, int64_t layers,
                int64_t B, int64_t Hkv, int64_t S, int64_t d, int64_t P);

typedef struct { /* how children are drawn: by logits / T + Gumbel noise, or by logits if T is 0 */
    const float *temperatures; /* (B) */
    const int64_t *seeds;      /* (B) */
    double sharpness;          /* factor on the logits in logp if T is 0 */
} Sampling;

void pick(const Sampling *sampling, const float *logits, const int64_t *positions, const int64_t *ids, int64_t *picked,
          float *logp, int64_t B, int64_t W, int64_t V, int64_t count);

typedef struct { /* a chain drafted after each root, token by token */
    Sampling sampling;
    const int64_t *kept;          /* (V) target ids of the draft ids, or NULL */
    const int64_t *root, *length; /* (B) the roots, and their positions */
    float *logits, *logp;         /* (B, V), (B): buffers for the next token's logits and log-probability */
    int64_t *ids, *positions;     /* (B): the tokens drafted last, and their positions */
    int64_t *slots;               /* (2 B): buffer for the slots of the tokens that are read */
    int64_t *tokens;              /* (B, depth + 1), the root first */
    float *scores;                /* (B, depth + 1), log-probability of the chain up to each token */
    int64_t depth, V;
} Chain;

typedef struct { /* a step of a head that recycles its state */
    Layer layer;
    Product project, output; /* project: K = 0 if there is none, and the layer reads the two halves directly */
    const float *token_norm, *state_norm;         /* (D) */
    const float *leave_norm, *read_norm;          /* (D) or NULL: of the state to recycle, of the output head's input */
    float token_eps, state_eps, leave_eps, read_eps;
    int64_t state_first, zero_first;              /* the state half is first; the token at position 0 reads as zeros */
    int64_t normed_residual;                      /* the residual is the normalized state */
} Module;

typedef struct { /* a draft model */
    const Layer *layers;
    const float *table, *norm; /* (.., D) embeddings, (D) weight of the final norm */
    Product output;            /* over the tokens that the draft and the target share */
    int64_t count;
    float eps;
} Model;

typedef struct { /* decided state of a batch, and the result of a round; see `heads.backends.torch.commit` */
    int64_t *length, *root, *limit, *output, *output_length, *rounds, *accepted, *reached, *report;
    uint8_t *done, *stops_at_eos;
    const int64_t *eos;
    int64_t *tokens, *start, *count; /* (B, M + 1), (B), (B) */
    int64_t B, M, num_eos, output_width, record_width, report_width;
} State;
