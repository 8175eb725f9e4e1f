/* What the kernels of a CPU take: decoder layers over few rows in float32, and the drafts made of them.
 *
 * A step of 1 to 16 rows ought to cost the time to read the weights once. Libraries pack a weight anew at each product,
 * which for few rows costs several times the arithmetic, and twenty small operations a layer cost as much again in
 * dispatch. Here weights and keys lie packed, and a layer is one call.
 *
 * Every sum runs in an order that depends on nothing but its own row: a row's result is the same, to the bit, whatever
 * rows stand beside it.
 *
 * Letters: B batch rows, N tokens of each, R = B * N rows, K inputs, O outputs, D hidden, I intermediate width, H query
 * heads, Hkv key heads, G = H / Hkv, d head dimension, E slots shown, S slots a batch row, V columns of a draft's logits.
 */

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const void *weight; /* packed: block b holds columns b * BLOCK .. of W^T as (K, BLOCK), the last padded with 0 */
    const float *bias;  /* (O) or NULL */
    int64_t K, O, half; /* half: weights in bfloat16, which a draft may have */
} Product;

typedef struct { /* around a sublayer, over the tokens of a batch row; `heads.block.convolution` */
    Product project;   /* to (2, taps, groups), of the sublayer's normed input */
    const float *base; /* (2, taps, D) */
    int64_t taps, groups; /* taps: 0 for none */
} Convolution;

typedef struct {
    Product qkv, out, gate_up, down;
    Convolution attention_conv, feedforward_conv;
    const float *attention_norm, *feedforward_norm; /* (D); the first NULL where the input comes normed */
    const float *head_norm;                         /* (H + Hkv, d) or NULL */
    float attention_eps, feedforward_eps, head_eps, scale;
    int64_t H, Hkv, d, window; /* window: 0 for none */
} Layer;

typedef struct {
    float *x;                     /* (R, D) the residual stream, updated */
    const float *input;           /* (R, K of qkv), where the layer has no norm of its own */
    const float *cosines, *sines; /* (positions, d), the first half of the sines negative */
    const int64_t *positions;     /* (R) */
    const int64_t *slots;         /* (R), of each batch row; -1: the token is kept nowhere, and what it gives is padding */
    const float *mask, *near_mask; /* (B, N, E), to be added to scores, the second in layers with a window; */
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

typedef struct { /* how children are drawn: by logits / T + Gumbel noise, or by logits where T is 0 */
    const float *temperatures; /* (B) */
    const int64_t *seeds;      /* (B) */
    double sharpness;          /* of the logarithms where T is 0 */
} Sampling;

void pick(const Sampling *sampling, const float *logits, const int64_t *positions, const int64_t *ids, int64_t *picked,
          float *logp, int64_t B, int64_t W, int64_t V, int64_t count);

typedef struct { /* a chain drafted behind each root, token by token */
    Sampling sampling;
    const int64_t *kept;          /* (V) the target's ids of the draft's, or NULL */
    const int64_t *root, *length; /* (B) the roots, and where they stand */
    float *logits, *logp;         /* (B, V), (B): room for the distribution of the next token */
    int64_t *ids, *positions;     /* (B): the tokens drafted last, and where they stand */
    int64_t *slots;               /* (2 B): room for the slots of what is read */
    int64_t *tokens;              /* (B, depth + 1), the root first */
    float *scores;                /* (B, depth + 1), log-probability up to each */
    int64_t depth, V;
} Chain;

typedef struct { /* a step of a head that recycles its state */
    Layer layer;
    Product project, output; /* project: K = 0 where the layer reads the two halves themselves beside the state */
    const float *token_norm, *state_norm;         /* (D) */
    const float *leave_norm, *read_norm;          /* (D) or NULL: of the state to recycle, and of what is read of it */
    float token_eps, state_eps, leave_eps, read_eps;
    int64_t state_first, zero_first;              /* which half comes first; is the token at position 0 read as zeros */
    int64_t normed_residual;                      /* is the residual the normed state */
} Module;

typedef struct { /* a draft model */
    const Layer *layers;
    const float *table, *norm; /* (.., D) embeddings, (D) of the final norm */
    Product output;            /* over the tokens that both can draft */
    int64_t count;
    float eps;
} Model;

typedef struct { /* `heads.backends.torch.commit`: what is decided of a batch, and what a round adds */
    int64_t *length, *root, *limit, *output, *output_length, *rounds, *accepted, *reached, *report;
    uint8_t *done, *stops_at_eos;
    const int64_t *eos;
    int64_t *tokens, *start, *count; /* (B, M + 1), (B), (B) */
    int64_t B, M, num_eos, output_width, record_width, report_width;
} State;
