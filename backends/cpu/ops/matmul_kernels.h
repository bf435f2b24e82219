// What a tier implements of a matrix product x[m, k] @ weight[n, k]^T; matmul.cc drives it.
//
// Weights are handled in tiles of 16 rows, so a vector lane is a weight row and k is sequential in every lane: a result
// depends on its own rows only, and on nothing that differs between tiers.
#pragma once

#include <cstdint>

#include "../dispatch.h"
#include "../../common/op_types.h"
#include "weight_formats.h"

namespace trivet {

inline constexpr int kTileRows = 16;
inline constexpr int kBlock = 32;        // elements that share an activation scale
inline constexpr int kPanelBlocks = 20;  // most 32-blocks that are unpacked at a time
inline constexpr int kGroupRows = 8;     // most rows that are packed as one group
inline constexpr int kMinPackedRows = 2;
inline constexpr int kNumFormats = 11;

// 16 weight rows x 32 elements, unsigned integers as stored plus scales, of kPanelBlocks blocks:
//
//   q[block][k / 4][row][k % 4]   one dword per row and k-group: what a dot-product instruction takes per lane
//   d[block][half][row]           scale of elements 0-15 and 16-31 (formats without halves use [0] for all 32)
//   m[block][row]                 added minimum
struct alignas(64) Panel {
  uint8_t q[kPanelBlocks][8][kTileRows][4];
  float d[kPanelBlocks][2][kTileRows];
  float m[kPanelBlocks][kTileRows];
};

// m rows of activations, quantised per block: x = q * d.
struct QuantizedRows {
  const void* q;              // [m, k] int8, or int16 where MatMulKernels::q_bytes is 2
  const float* d;             // [m, k / 32]
  const float* sum;           // [m, k / 32]: d * float(sum of q)
  const int32_t* correction;  // [m, k / 32, 2]: -zero_point * sum of q, per half; [0] is the whole block without halves
};

struct TileArgs {
  const uint8_t* weight;  // 16 rows
  int64_t row_bytes;
  int64_t num_blocks;  // k / 32
  QuantizedRows x;
  int64_t m;
  float* acc;  // [m, acc_stride], 16 floats are written per row
  int64_t acc_stride;
  Panel* panel;  // scratch
  bool into_l1;  // see prefetches_into_l1()
};

inline constexpr int64_t kPanelGroupRows = 6;  // most of each group of more rows: what fits registers with two tiles

// Rows of activations in groups of nearly equal size, for tiers that multiply a group at a time. Always inlined: no
// other file may be linked with what a tier's instructions made of it.
struct RowGroups {
  int64_t rows;
  int64_t count;

  [[gnu::always_inline]] RowGroups(int64_t m, int64_t groups) : rows(m), count(groups) {}
  [[gnu::always_inline]] explicit RowGroups(int64_t m) : RowGroups(m, (m + most(m) - 1) / most(m)) {}
  // One group of few rows; else groups that are multiplied with two panels.
  [[gnu::always_inline]] static constexpr int64_t most(int64_t m) {
    return m <= kGroupRows ? kGroupRows : kPanelGroupRows;
  }
  [[gnu::always_inline]] int64_t start(int64_t group) const { return group * rows / count; }
};

// Bytes of a row's 32-block in packed activations. A group is packed by itself; per 32-block of its r rows:
//
//   int8 q[r][32]
//   float d[r]
//   float sum[r], with a zero point of 0; else int32 correction[r], or correction[2][r] with halves
[[gnu::always_inline]] constexpr int64_t packed_block_bytes(bool halves) { return kBlock + 4 + (halves ? 8 : 4); }

// Results of 32 weight rows: those of rows 16 t ... 16 t + 15 are at tile[t], one activation row every `stride` floats.
struct Sums {
  float* tile[2];
  int64_t stride;
};

struct PackedTileArgs {
  const uint8_t* weight;  // 32 rows
  int64_t row_bytes;
  int64_t num_blocks;  // k / 32
  const uint8_t* x;    // packed activations of all groups
  RowGroups groups;
  int64_t first_group;  // those to multiply: [first_group, last_group)
  int64_t last_group;
  Sums y;          // from the first group's first row on
  float* partial;  // scratch: 32 floats per row, aligned to 64 bytes
  Panel* panels;   // scratch, 2
  bool into_l1;
};

struct FloatTileArgs {
  const float* weight;  // [n, k], n <= 16
  int64_t weight_stride;
  int n;
  const float* x;  // [m, k]
  int64_t x_stride;
  int64_t m;
  int64_t k;   // a multiple of 16
  float* acc;  // [m, acc_stride], n floats are written per row
  int64_t acc_stride;
};

struct MatMulKernels {
  int q_bytes;  // per activation element
  // Quantises one row. sums: [k / 32, 2], sum of q per half.
  void (*quantize)(const float* x, int64_t k, void* q, float* d, float* sum, int32_t* sums);
  void (*tile[kNumFormats])(const TileArgs& args);  // by Format; null for float formats
  // With kMinPackedRows and more rows; null = the tier has tile() only. pack() takes some quantised blocks of each
  // row of a group.
  void (*pack)(const QuantizedRows& x, const int32_t* sums, int64_t rows, int64_t blocks, int zero_point, bool halves,
               uint8_t* out);
  void (*packed_tiles[kNumFormats])(const PackedTileArgs& args);
  void (*float_tile)(const FloatTileArgs& args);
  // Conversion of a row, whole blocks; null = WeightFormat::dequantize.
  void (*convert_f16)(const uint8_t* row, int64_t n, float* out);
  void (*convert_bf16)(const uint8_t* row, int64_t n, float* out);
  // y[m, :n] = activation(gate) * up; gate and up are [m, 16].
  void (*glu)(Epilogue epilogue, const float* gate, const float* up, int64_t m, int n, float* y, int64_t y_stride);
  void (*soft_cap)(float cap, float* y, int64_t n);
};

extern const MatMulKernels kMatMulScalar;
extern const MatMulKernels kMatMulBaseline;
extern const MatMulKernels kMatMulAvx2;
extern const MatMulKernels kMatMulAvxVnni;
extern const MatMulKernels kMatMulAvx512Vnni;
extern const MatMulKernels kMatMulNeon;
extern const MatMulKernels kMatMulDotprod;
extern const MatMulKernels kMatMulI8mm;

const MatMulKernels& matmul_kernels(Tier tier);

}  // namespace trivet
