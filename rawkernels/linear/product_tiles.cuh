#pragma once
// The tiles of ROWS x COLUMNS of a matrix product's result, numbered row by row.
struct Problem { int rows, columns, depth; };  // the result is rows x columns

template <int ROWS, int COLUMNS> struct ProductTiles {
    int across, count;
    __device__ __forceinline__ ProductTiles(const Problem& p) {
        across = (p.columns + COLUMNS - 1) / COLUMNS;
        count = (p.rows + ROWS - 1) / ROWS * across;
    }
    __device__ __forceinline__ int row(int tile) const { return tile / across * ROWS; }
    __device__ __forceinline__ int column(int tile) const { return tile % across * COLUMNS; }
};
