#pragma once
// Tiles of ROWS x COLUMNS of a product's result, in rows of tiles, one after the other to each block.
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
