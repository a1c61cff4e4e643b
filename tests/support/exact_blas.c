/* cblas_sgemm, bit for bit as the reference BLAS that comes with MLX, some ten times as fast.

   Every element of a product is one sum from the first to the last index, each product rounded
   before it is added: so it does not depend on how many rows stand beside it, and a warm prompt
   can be compared with a cold one to the last bit. The reference does this one element at a
   time; here sixteen elements stand side by side in vector registers. Other fast libraries sum
   in another order, and in one that depends on the number of rows (L-22).

   The same bits are promised for alpha = 1, which is all that MLX asks for. exact_blas.py
   compiles this and loads it before MLX. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define PANEL 16 /* rows that are summed side by side: two vectors */
#define COLUMNS 4 /* columns that share a loaded row */

typedef float vector __attribute__((vector_size(4 * LANES)));

typedef struct {
    const float *data;
    ptrdiff_t row_step, column_step; /* in floats */
} matrix;

/* Rows [row, row + n_rows) of `a`, the column index outermost; missing rows are zero. */
static void pack_rows(float *panel, matrix a, int row, int n_rows, int depth)
{
    const float *start = a.data + row * a.row_step;

    if (n_rows < PANEL)
        memset(panel, 0, sizeof(float) * PANEL * depth);
    for (int l = 0; l < depth; l++)
        for (int i = 0; i < n_rows; i++)
            panel[l * PANEL + i] = start[i * a.row_step + l * a.column_step];
}

/* As pack_rows, where the rows lie one behind the other: blocks of 8 x 8 are turned in registers. */
static void pack_long_rows(float *panel, matrix a, int row, int depth)
{
    typedef int mask __attribute__((vector_size(4 * LANES)));
    const mask low_pairs = {0, 8, 1, 9, 4, 12, 5, 13}, high_pairs = {2, 10, 3, 11, 6, 14, 7, 15};
    const mask low_fours = {0, 1, 8, 9, 4, 5, 12, 13}, high_fours = {2, 3, 10, 11, 6, 7, 14, 15};
    const mask low_half = {0, 1, 2, 3, 8, 9, 10, 11}, high_half = {4, 5, 6, 7, 12, 13, 14, 15};
    int l = 0;

    for (; l + LANES <= depth; l += LANES)
        for (int half = 0; half < PANEL; half += LANES) {
            vector r[LANES], pairs[LANES], fours[LANES];

            for (int i = 0; i < LANES; i++)
                memcpy(&r[i], a.data + (row + half + i) * a.row_step + l, sizeof(vector));
            for (int i = 0; i < LANES; i += 2) {
                pairs[i] = __builtin_shuffle(r[i], r[i + 1], low_pairs);
                pairs[i + 1] = __builtin_shuffle(r[i], r[i + 1], high_pairs);
            }
            for (int i = 0; i < LANES; i += 4)
                for (int odd = 0; odd < 2; odd++) {
                    vector x = pairs[i + odd], y = pairs[i + 2 + odd];
                    fours[i + 2 * odd] = __builtin_shuffle(x, y, low_fours);
                    fours[i + 2 * odd + 1] = __builtin_shuffle(x, y, high_fours);
                }
            for (int i = 0; i < 4; i++) {
                vector low = __builtin_shuffle(fours[i], fours[i + 4], low_half);
                vector high = __builtin_shuffle(fours[i], fours[i + 4], high_half);
                memcpy(panel + (l + i) * PANEL + half, &low, sizeof low);
                memcpy(panel + (l + i + 4) * PANEL + half, &high, sizeof high);
            }
        }
    for (; l < depth; l++)
        for (int i = 0; i < PANEL; i++)
            panel[l * PANEL + i] = a.data[(row + i) * a.row_step + l];
}

/* sums[j] += the panel times column `column + j` of `b`, for n_columns <= COLUMNS. */
static inline __attribute__((always_inline)) void multiply_panel(
    float sums[COLUMNS][PANEL], const float *panel, matrix b, int column, int n_columns, int depth)
{
    vector low[COLUMNS], high[COLUMNS];
    const float *start = b.data + column * b.column_step;

    for (int j = 0; j < n_columns; j++) {
        memcpy(&low[j], sums[j], sizeof(vector));
        memcpy(&high[j], sums[j] + LANES, sizeof(vector));
    }

    for (int l = 0; l < depth; l++) {
        vector a_low, a_high;

        memcpy(&a_low, panel + l * PANEL, sizeof a_low);
        memcpy(&a_high, panel + l * PANEL + LANES, sizeof a_high);
        for (int j = 0; j < n_columns; j++) {
            float factor = start[l * b.row_step + j * b.column_step];

            low[j] += a_low * factor;
            high[j] += a_high * factor;
        }
    }
    for (int j = 0; j < n_columns; j++) {
        memcpy(sums[j], &low[j], sizeof(vector));
        memcpy(sums[j] + LANES, &high[j], sizeof(vector));
    }
}

/* Sums start from 0, or where `adds_to_output` from beta * C. */
static void multiply(matrix a, matrix b, float *c, ptrdiff_t row_step, ptrdiff_t column_step,
                     int n_rows, int n_columns, int depth, float alpha, float beta,
                     int adds_to_output)
{
    float *panel = aligned_alloc(64, sizeof(float) * PANEL * (depth ? depth : 1));

    for (int row = 0; row < n_rows; row += PANEL) {
        int height = n_rows - row < PANEL ? n_rows - row : PANEL;

        if (height == PANEL && a.column_step == 1)
            pack_long_rows(panel, a, row, depth);
        else
            pack_rows(panel, a, row, height, depth);

        for (int column = 0; column < n_columns; column += COLUMNS) {
            int width = n_columns - column < COLUMNS ? n_columns - column : COLUMNS;
            float *out = c + row * row_step + column * column_step;
            float sums[COLUMNS][PANEL] = {0};

            if (adds_to_output)
                for (int j = 0; j < width; j++)
                    for (int i = 0; i < height; i++)
                        sums[j][i] = beta * out[i * row_step + j * column_step];

            if (width == COLUMNS)
                multiply_panel(sums, panel, b, column, COLUMNS, depth);
            else if (width == 1)
                multiply_panel(sums, panel, b, column, 1, depth);
            else
                multiply_panel(sums, panel, b, column, width, depth);

            for (int j = 0; j < width; j++)
                for (int i = 0; i < height; i++) {
                    float *element = out + i * row_step + j * column_step;
                    float product = alpha * sums[j][i];

                    if (beta != 0.0f && !adds_to_output)
                        product += beta * *element;
                    *element = product;
                }
        }
    }
    free(panel);
}

enum { ROW_MAJOR = 101, NOT_TRANSPOSED = 111 };

static matrix view(const float *data, int step, int order, int transpose)
{
    int rows_are_long = (order == ROW_MAJOR) == (transpose == NOT_TRANSPOSED);

    return rows_are_long ? (matrix){data, step, 1} : (matrix){data, 1, step};
}

void cblas_sgemm(int order, int transpose_a, int transpose_b, int n_rows, int n_columns, int depth,
                 float alpha, const float *a_data, int a_step, const float *b_data, int b_step,
                 float beta, float *c, int c_step)
{
    matrix a = view(a_data, a_step, order, transpose_a);
    matrix b = view(b_data, b_step, order, transpose_b);
    ptrdiff_t row_step = order == ROW_MAJOR ? c_step : 1;
    ptrdiff_t column_step = order == ROW_MAJOR ? 1 : c_step;
    /* where the reference has it: its first factor by columns, with sums in the output */
    int first_transpose = order == ROW_MAJOR ? transpose_b : transpose_a;
    int adds_to_output = first_transpose == NOT_TRANSPOSED && alpha == 1.0f && beta != 0.0f;

    if (n_rows >= n_columns) {
        multiply(a, b, c, row_step, column_step, n_rows, n_columns, depth, alpha, beta,
                 adds_to_output);
        return;
    }
    /* the transposed product, so that the longer side stands in the vectors */
    matrix a_turned = {a.data, a.column_step, a.row_step};
    matrix b_turned = {b.data, b.column_step, b.row_step};
    multiply(b_turned, a_turned, c, column_step, row_step, n_columns, n_rows, depth, alpha, beta,
             adds_to_output);
}
